"""True on-policy: prove that two engines agree bit for bit, find where they do not, and make them agree."""
