"""Pictures and pages of commands and trainings: panels, galleries of slots, turntables of scenes."""
