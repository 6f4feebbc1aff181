"""Who may use the server and how much: keys, their rights and limits, and what each has used."""
