"""`specserve draft train` and `draft eval`: drafts taught on the target's own answers."""
