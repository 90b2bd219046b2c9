"""`python -m tideway`"""

from tideway.command import main

main()
