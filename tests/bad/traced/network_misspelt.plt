import "../base/digits.plt"

model {
  network = python("nets:netwrok") #! E0802
}
