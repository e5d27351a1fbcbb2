"""The user's request as pure values: options, the job, and the plan made from both. Nothing here communicates."""
