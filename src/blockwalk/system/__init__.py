"""The operating system: files that are whole or not there, memory of the process, the heap."""
