import "base/digits.plt"

expect {
  devices     == 4 #! E0502
  peak_memory <  1kB #! E0502
  parameters  >= 1_000 #! E0502
}
