"""What Blockyard's processes say to one another: one kind of message, one chain of numbers, one connection.

message      a kind, fields, arrays of integers, and a digest over all of it
chain        the number of each message, and the digest of those before it
connection   whole messages in order over a socket, with time limits
plans        the plan of each step, from the process that decides to those that carry out
"""
