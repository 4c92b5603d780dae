"""The fault museum: faults that real engines had, each planted here in one line, and caught."""
