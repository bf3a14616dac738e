"""The HTTP side: aiohttp routes, wire Structs, server-sent events. Knows the engine, not torch."""
