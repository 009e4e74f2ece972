"""The clients for asyncio."""
