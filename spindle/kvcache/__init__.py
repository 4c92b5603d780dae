"""Memory: stores of keys and values that hand out one step's view.

A cache has no clock. The StepIndex of a step says where its tokens go; to rewind is to start
earlier.
"""
