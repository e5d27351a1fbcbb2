"""Reads run directories afterwards: tables, plots and the report page."""
