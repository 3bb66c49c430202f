"""Job B: training on the grid, end to end, and the merge that is proved."""
