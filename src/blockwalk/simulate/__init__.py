"""The executor of programs on paper: seconds, bytes and peaks on described hardware. No torch."""
