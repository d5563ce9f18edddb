"""Are the log-probs of both engines the same bits?"""
