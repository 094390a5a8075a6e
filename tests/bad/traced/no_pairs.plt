import "../base/own.plt"

model {
  network = python("structures:Beside")
  loss    = python("structures:mean")
}

data {
  source = python("structures:Wholes") #! E0802
}
