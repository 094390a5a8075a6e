import "../base/digits.plt"

model {
  network = python("structures:Looking") #! W0326
}

parallelism {
  tensor = 2 #! E0320
}
