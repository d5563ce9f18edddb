"""The custom generate function of slime and Miles."""
