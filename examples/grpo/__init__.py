"""A small GRPO run with a Megatron-Core trainer and a separate inference engine."""
