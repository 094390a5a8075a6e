# to be written

# soon
