import "base/gpt.plt"

data {
  documents = 10
}

memory {
  recompute = selective  #! E0329
}

train {
  compile = true
}
