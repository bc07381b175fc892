"""Jobs on clusters: description, submission, status and resubmission."""
