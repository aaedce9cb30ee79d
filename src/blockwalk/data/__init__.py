"""Data: records from files (formats), tokens and loss masks (encode), batches in a resumable order
(batching)."""
