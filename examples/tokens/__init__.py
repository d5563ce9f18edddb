"""What the demonstration of on-policy tokens consists of."""
