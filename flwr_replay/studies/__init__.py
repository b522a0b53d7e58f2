"""Several runs side by side: comparisons, and a paper's tables as lists of them."""
