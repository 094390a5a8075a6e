import "circle_a.plt"
