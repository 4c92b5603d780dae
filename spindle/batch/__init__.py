"""Files of prompts: a shell around LLM that can be killed at any moment.

    IN.jsonl  --lines-->  tasks  --work, or cluster-->  results  --one write each-->  OUT.jsonl
                            ^                                                            |
                            +---- ledger: the custom_ids that are done or were seen <----+

The results are the only state: what OUT has is done, and all else is done again. A result names
what it was made with (its `system_fingerprint`), and its id is a digest of that and of its line of
IN, so results of other lines, or of another engine, are noticed before anything is written. Memory
does not grow with the files: a window of tasks is at work, and the ledger lies on the disk.
"""
