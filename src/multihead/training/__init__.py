"""Training: the loop, what it trains, and the folder that a run leaves."""
