"""Data: records (sources, formats), texts (render), tokens and loss masks (encode), batches in a
resumable order (batching)."""
