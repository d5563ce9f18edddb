"""The demonstration that a trainer and an inference engine can agree bit for bit."""
