import "base/gpt.plt"

data {
  documents = 300 #! E0329
}

parallelism {
  pipeline = 2
}
