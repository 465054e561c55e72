"""What a response is worth: functions of one response, and who runs them. No torch here."""
