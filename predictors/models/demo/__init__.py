"""The questions that the demo model learns: their wordings, their answers, and made-up
tools for their prompts."""
