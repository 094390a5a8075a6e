import "../base/digits.plt"

model {
  network = python("parameters:Net", kind = "overlapping") #! E0802
}
