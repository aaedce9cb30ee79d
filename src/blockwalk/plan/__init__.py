"""Plans: the table of methods and every choice that a row makes. No torch."""
