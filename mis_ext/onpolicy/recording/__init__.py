"""What every module computed in both engines, and where they differ."""
