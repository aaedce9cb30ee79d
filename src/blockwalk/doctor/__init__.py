"""Measuring a machine: rates, links and walks, for forecasts."""
