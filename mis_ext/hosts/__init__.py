"""Where the hosts plug in. They are told apart by the keywords they pass and are never imported."""
