"""The model that a user names: found on the hub, in a folder or in a GGUF file, and checked before
anything is read."""
