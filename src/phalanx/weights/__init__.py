"""From files to shards."""
