"""Who guesses, how many tokens, and whether it pays: everything between the runner and a drafter.

Pure Python on the worker thread; no tensor is touched beyond handing a drafter its own slice.
"""
