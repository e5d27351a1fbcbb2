"""What was asked for, as pure values: options, the job, and the plan made of both. Nothing here communicates."""
