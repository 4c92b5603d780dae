"""Files of prompts: a shell around LLM that can be killed at any moment.

    IN.jsonl  --lines-->  tasks  --work, or cluster-->  results  --one write each-->  OUT.jsonl
                            ^                                                            |
                            +---- ledger: the custom_ids that are done or were seen <----+

The results are the only state: what OUT has is done, and all else is done again. A result's id is
a digest of its line of IN and of what it was run with, so results of other lines, or of another
model, are noticed before anything is written. Memory does not grow with the files: a window of
tasks is at work, and the ledger lies on the disk.
"""
