"""What frameworks need from the correction. A host adapter knows its framework; nothing else does."""
