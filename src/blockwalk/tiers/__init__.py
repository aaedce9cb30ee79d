"""The memories that state lives in: host, disk, block stores and checkpoint folders."""
