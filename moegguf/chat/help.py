"""Help texts of the chat that are not in its tables of commands: Ollama's, where it has them."""

MORE = """\
  /? shortcuts    Help for keyboard shortcuts

Use \"\"\" to begin a multi-line message.
"""

PARAMETERS = """\
Available Parameters:
  /set parameter seed <int>             Random number seed
  /set parameter num_predict <int>      Max number of tokens to predict
  /set parameter top_k <int>            Pick from top k num of tokens
  /set parameter top_p <float>          Pick token based on sum of probabilities
  /set parameter min_p <float>          Pick token based on top token probability * min_p
  /set parameter num_keep <int>         Tokens that stay when the context is full
  /set parameter num_ctx <int>          Set the context size
  /set parameter temperature <float>    Set creativity level
  /set parameter repeat_penalty <float> How strongly to penalize repetitions
  /set parameter repeat_last_n <int>    Set how far back to look for repetitions
  /set parameter num_gpu <int>          The number of layers to send to the GPU
  /set parameter stop <string> <string> ...   Set the stop parameters
"""

SHORTCUTS = """\
Available keyboard shortcuts:
  Ctrl + a            Move to the beginning of the line (Home)
  Ctrl + e            Move to the end of the line (End)
   Alt + b            Move back (left) one word
   Alt + f            Move forward (right) one word
  Ctrl + k            Delete the sentence after the cursor
  Ctrl + u            Delete the sentence before the cursor
  Ctrl + w            Delete the word before the cursor
  Ctrl + p, Ctrl + n  The message before, the message after (Up, Down)
  Ctrl + r            Search the messages before

  Ctrl + j            Begin a new line
  Ctrl + l            Clear the screen
  Ctrl + g            Open default editor to compose a prompt
  Ctrl + c            Stop the model from responding
  Ctrl + z            Suspend
  Ctrl + d            Exit (/bye)
"""
