"""Read run directories: tables, plots and the report page."""
