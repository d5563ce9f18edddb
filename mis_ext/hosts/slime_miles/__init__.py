"""slime and Miles: their arguments, their keys, and how they call."""
