"""Complete training programs built on gradbalance; run from a checkout, not installed."""
