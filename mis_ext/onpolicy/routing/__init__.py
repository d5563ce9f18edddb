"""The experts that the rollout engine chose, in the trainer."""
