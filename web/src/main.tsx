import { render } from "preact";
import { App } from "./app";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/controls.css";
import "uplot/dist/uPlot.min.css";
import "./styles/chart.css";

render(<App />, document.getElementById("app")!);
