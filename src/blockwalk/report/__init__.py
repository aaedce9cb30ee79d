"""Forecasts, advice and the page that ``blockwalk report`` writes."""
