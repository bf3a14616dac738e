"""Traces, metrics and logs of a server, made from compact records. Imports nothing else of ours."""
